"""moecore inside torchtitan: what both versions share, 0.2 in `v02`, 0.3 in `v03`."""

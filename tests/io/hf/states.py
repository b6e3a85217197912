"""State dicts by the names of `plan_hf_tensors`: what files and loaders are compared with."""

from collections.abc import Mapping

from torch import Tensor

from moecore.io.hf.names import HEAD, infer_hf_layout, map_hf_copies, plan_hf_tensors
from moecore.models.config import DecoderConfig


def native_state(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return the native state dict of a Hugging Face one in any layout, in each tensor's dtype."""
    native: dict[str, Tensor] = {}
    for name, recipe in plan_hf_tensors(config, infer_hf_layout(state.keys())).items():
        native[name] = whole = state[recipe.pieces[0].name].new_empty(recipe.shape)
        for piece in recipe.pieces:
            theirs = state[piece.name]
            assert theirs.shape == piece.file_shape, piece.name
            if piece.view is not None:
                theirs = piece.view.apply(theirs.contiguous())
            whole[piece.region].copy_(theirs.reshape(whole[piece.region].shape))
    return native


def hf_state(state, config, *, layout):
    """Return the Hugging Face state dict of a native one; a tied head is left out."""
    pieces = [
        (n, p) for n, recipe in plan_hf_tensors(config, layout).items() for p in recipe.pieces
    ]
    theirs = {}
    for name, piece in pieces:
        part = state[name][piece.region].reshape(piece.shape)
        if piece.view is None:
            theirs[piece.name] = part
        else:
            whole = theirs.setdefault(piece.name, part.new_empty(piece.file_shape))
            view = piece.view.apply(whole)
            view.copy_(part.reshape(view.shape))
    copies = {copy: theirs[n] for copy, n in map_hf_copies(config).items() if copy != HEAD}
    return theirs | copies

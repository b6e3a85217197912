"""From a corpus to rows: files of documents, their order, mixtures, packing and positions."""

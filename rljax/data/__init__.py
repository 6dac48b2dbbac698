"""Problems, tokenizers, and rows of token ids; order is a function of (seed, step) alone."""

"""Code that the architectures share: tables of parameters, layers, the decoder, and reading of `config.json`."""

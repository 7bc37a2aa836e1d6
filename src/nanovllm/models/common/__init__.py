"""What the architectures share: tables of parameters, layers, the decoder."""

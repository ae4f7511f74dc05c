"""Encoders, from inputs to features of the candidates: ``resnet`` for pixels, ``transformer`` for sets."""

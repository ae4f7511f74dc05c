"""The benchmarks, each a folder with its data, encoder and configuration."""

"""Hugging Face checkpoints: a folder of safetensors with a ``config.json``, both ways."""

"""mxjax: training large language models in JAX, mixture-of-experts models above all."""

__version__ = "0.1.0"

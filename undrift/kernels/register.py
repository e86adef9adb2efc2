"""Importing this module registers all faster forms with their plain functions."""

from undrift.kernels import (  # noqa: F401
    attention_stacked,
    chain,
    cone3_gpu,
    cone_gpu,
    consistency_gpu,
    conv_gpu,
    conv_stacked_gpu,
    cross_entropy_gpu,
    dense_step_gpu,
    gram_gpu,
    linear_stacked,
    mean,
    memory_cpu,
    memory_gpu,
    norm_stacked_gpu,
    pictures_gpu,
    wide_cpu,
)

import undrift.kernels.register  # noqa: F401  gives the plain functions their faster forms

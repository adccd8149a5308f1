"""Prewarm module: loads AWS service models before workers are forked."""

from afield.sdk.stores import load_aws_models

load_aws_models()

"""Model arithmetic that engines and trainers share: masks, precision, rounding, images."""

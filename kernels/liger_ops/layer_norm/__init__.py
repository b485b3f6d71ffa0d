"""Layer normalisation: each row less its mean, over its standard deviation."""

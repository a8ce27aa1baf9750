"""Forecasts of how many nodes will be wanted: features, quantile model, baselines."""

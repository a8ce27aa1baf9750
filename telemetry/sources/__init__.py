"""Where records come from. Every source is a `Source`: batches of rows of one table, with counts."""

"""The store of nights: append-only Parquet files, and DuckDB over them."""

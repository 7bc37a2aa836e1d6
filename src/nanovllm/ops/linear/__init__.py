"""Matrix products, plain and fused with norms."""

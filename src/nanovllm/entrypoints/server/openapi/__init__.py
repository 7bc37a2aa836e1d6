"""The OpenAPI document of the server, and a page for people made from it."""

"""How a dump is proven to belong to a request."""

"""Adapters for libraries that bring their own models. `distca` itself imports none of them."""

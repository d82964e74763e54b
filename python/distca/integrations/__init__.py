"""Adapters for libraries that bring their own models. Nothing here is imported by `distca` itself."""

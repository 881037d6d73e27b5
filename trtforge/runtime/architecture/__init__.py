"""A checkpoint's config.json as the specification of a decoder."""

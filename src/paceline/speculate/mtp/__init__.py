"""MTP: a model's own layers behind its last, which predict a token further."""

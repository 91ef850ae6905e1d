"""Who may ask a server what, and from where: keys, other origins, TLS."""

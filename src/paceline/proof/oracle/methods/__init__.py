"""Methods: what one layer means, a module each, in float64, by nobody's code but its own."""

"""An honest benchmark: denoisers of real size, both sides in the same mode, one CSV row a measurement."""

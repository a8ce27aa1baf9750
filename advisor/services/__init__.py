"""The services: what almanac learns of a site, each for itself, behind one interface (helios-qssf-ces, 4.1)."""

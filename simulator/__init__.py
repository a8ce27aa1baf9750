"""An event-driven cluster for proving policies before they are switched on. Holds no policy yet."""

"""Back-tests, replays of the record, and scores."""

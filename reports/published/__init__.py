"""Reports and job lists that users read without access to the store."""

"""Reports on past GPU jobs: per job (terminal, page, mail), weekly, for the whole site, and plots of back-tests."""

"""Run time per GPU type: what the site's runs and the hardware's specifications say of a job family's speed."""

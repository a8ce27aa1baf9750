"""The site of reported_site.py, for every test of reports."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reported_site import reported as reported

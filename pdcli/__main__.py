"""``python -m pdcli`` is ``pipedream``."""

import sys

from pdcli.main import main

if __name__ == "__main__":
    sys.exit(main())

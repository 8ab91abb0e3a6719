"The same as `specdec audit`."
import sys

from specdec.app.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "audit")
    main()

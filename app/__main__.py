"""``python -m app`` is ``hark``."""

from app.cli import main

if __name__ == "__main__":
    main()

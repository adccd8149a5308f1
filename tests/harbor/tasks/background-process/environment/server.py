import os
import time
from pathlib import Path

Path("/app/server.pid").write_text(str(os.getpid()))
time.sleep(3600)

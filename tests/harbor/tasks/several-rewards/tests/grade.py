import json
from pathlib import Path

lines = Path("/app/words.txt").read_text().splitlines()
scores = {"sorted": float(lines == sorted(lines)), "unique": float(len(lines) == len(set(lines)))}
kept = set(lines) == {"apple", "fig", "pear"}
scores["reward"] = scores["sorted"] * scores["unique"] * kept
Path("/logs/verifier/reward.json").write_text(json.dumps(scores))

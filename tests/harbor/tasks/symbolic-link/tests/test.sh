#!/bin/bash
if [ -L current ] && [ -L old ] && [ "$(cat current/version) $(cat old/version)" = "1.10 1.9" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

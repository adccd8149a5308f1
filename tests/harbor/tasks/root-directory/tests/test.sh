#!/bin/bash
if [ "$(cat /etc/motd /var/lib/notes/1.txt /answers/2.txt 2>/dev/null | tr '\n' ' ')" = "welcome one two " ]; then
  echo '{"passed": true}' > /logs/verifier/reward.json
else
  echo '{"passed": false}' > /logs/verifier/reward.json
fi

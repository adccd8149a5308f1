#!/bin/bash
printf 'a\nbb bb\nc\n' > /tmp/lines
if [ -x longest.sh ] && [ "$(./longest.sh /tmp/lines)" = "bb bb" ] && [ "$(./longest.sh example.txt)" = three ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

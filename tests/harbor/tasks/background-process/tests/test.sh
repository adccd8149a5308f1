#!/bin/bash
if [ "$(cat status 2>/dev/null)" = started ] && [ -s server.pid ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt

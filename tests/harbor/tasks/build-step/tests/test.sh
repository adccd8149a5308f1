#!/bin/bash
[ "$(cat total.txt 2>/dev/null)" = 2870 ] && [ "$(add 2 3)" = 5 ] && reward=1
echo "${reward:-0}" > /logs/verifier/reward.txt

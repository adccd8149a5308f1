#!/bin/sh
expected='./csv/b.csv
./csv/c.csv
./inbox/notes.txt'
if [ "$(cd /data && find . -type f | sort)" = "$expected" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt

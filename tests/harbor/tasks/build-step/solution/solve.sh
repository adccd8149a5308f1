#!/bin/bash
total=0
while read -r number; do total=$(add "$total" "$number"); done < /opt/ledger/entries.txt
echo "$total" > /srv/report/total.txt

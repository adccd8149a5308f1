#!/bin/bash
python3 server.py > /dev/null 2>&1 &
until [ -s server.pid ]; do sleep 0.05; done
echo started > status

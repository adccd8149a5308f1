#!/bin/bash
[ "$WORD" = hello ] && echo "$GREETING $(level)" > greeting.txt

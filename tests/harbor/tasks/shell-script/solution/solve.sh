#!/bin/sh
cat > longest.sh <<'SH'
#!/bin/sh
awk 'length($0) > length(best) { best = $0 } END { print best }' "$1"
SH
chmod +x longest.sh

#!/bin/sh
# Put the passwords' hashes into users.acl and start the server. Usage: redis-start.sh [redis-server options]
# Reads ADMIN_PASSWORD, OPERATOR_PASSWORD, PRODUCER_PASSWORD, BULK_PASSWORD, WORKER_PASSWORD and MONITOR_PASSWORD; a user without one stays locked.
set -eu

etc=${REDIS_ETC:-/etc/redis}
run=${REDIS_RUN:-/run/redis}

hash() { printf '%s' "$1" | sha256sum | cut -d ' ' -f 1; }

# fill USER PASSWORD: a sed expression that gives the user its hash, or switches it off
fill() {
  if [ -n "$2" ]; then
    printf 's/^user %s on #PASSWORD_SHA256 /user %s on #%s /\n' "$1" "$1" "$(hash "$2")"
  else
    printf 's/^user %s on #PASSWORD_SHA256 /user %s off /\n' "$1" "$1"
  fi
}

umask 077
{
  fill admin "${ADMIN_PASSWORD:-}"
  fill operator "${OPERATOR_PASSWORD:-}"
  fill producer "${PRODUCER_PASSWORD:-}"
  fill bulk "${BULK_PASSWORD:-}"
  fill worker "${WORKER_PASSWORD:-}"
  fill monitor "${MONITOR_PASSWORD:-}"
} > "$run/passwords.sed"
# These came with Redis 7.2, and an older server does not start where an ACL names them.
case $(redis-server --version) in
  *v=7.0.*) printf 's/ +client|setinfo//g\ns/ +waitaof//g\n' >> "$run/passwords.sed" ;;
esac
# An ACL file takes neither comments nor blank lines.
sed -f "$run/passwords.sed" -e '/^#/d' -e '/^$/d' "$etc/users.acl" > "$run/users.acl"
rm "$run/passwords.sed"

exec redis-server "$etc/redis.conf" --aclfile "$run/users.acl" "$@"

#!/bin/sh
# almanac-copy.sh [SETTINGS]: copies published advice to this host, as root. SETTINGS: /etc/default/almanac-copy.
# Exit status: 0 copied, 3 wrong settings or an unsafe folder, 5 rsync failed (what was copied before stays).
#
# Files for users are fetched to .copy, which only root can open, and almanac-distribute gives each to its reader, with
# the rights that this host's file system allows. Links, FIFOs, devices, and large files are not copied.
settings=${1:-/etc/default/almanac-copy}
case $settings in */*) ;; *) settings=./$settings ;; esac
PATH=/usr/sbin:/usr/bin:/sbin:/bin
USER_SOURCE='' SCHED_SOURCE='' SCHED_GROUP='' SSH_KEY=/etc/almanac/copy.key KNOWN_HOSTS=/etc/almanac/copy.known_hosts
ADVICE_DIR=/var/lib/almanac-advice DISTRIBUTE=almanac-distribute

refuse() { # WHAT TODO
    printf 'error: %s\ntry: %s\n' "$1" "$2" >&2
    exit 3
}

# A folder of ours alone: job_submit believes what is below, and slurmctld waits at a FIFO.
require_own() {
    if [ -L "$1" ] || [ ! -d "$1" ]; then refuse "$1 is not a folder" "remove it, and run this again"; fi
    case $(stat -c '%u %A' "$1") in
    "$(id -u) d"????-??-?) ;;
    *) refuse "$1: $(stat -c 'owner %U, mode %a' "$1"), expected root and no write access for others" \
        "chown root $1; chmod go-w $1" ;;
    esac
}

copy_part() { # PART SOURCE FOLDER MODE_OF_FOLDERS MODE_OF_FILES LARGEST OPTION...
    part=$1 source=$2 folder=$3 modes=D$4,F$5 size=$6
    [ -n "$source" ] || return 0
    [ -e "$folder" ] || [ -L "$folder" ] || mkdir -m "$4" "$folder"
    require_own "$folder"
    shift 6
    # --delete-delay: nothing is missing during the copy. Each file is replaced whole, by rename.
    rsync --recursive --times --perms "$@" --chmod="$modes" --max-size="$size" --whole-file --delete-delay \
        --exclude='.*' --timeout=300 -- "$source/" "$folder/" || failed="$failed $part"
}

[ -f "$settings" ] && [ -r "$settings" ] || refuse "$settings: cannot be read" "run this as root, or name a file of settings"
case $(stat -L -c '%u %A' "$settings") in
"$(id -u) "?????-??-? | "0 "?????-??-?) ;;
*) refuse "$settings: $(stat -L -c 'owner %U, mode %a' "$settings"), expected root and no write access for others" \
    "check what it says, then: chown root $settings; chmod go-w $settings" ;;
esac
. "$settings"
[ -n "$USER_SOURCE$SCHED_SOURCE" ] || refuse "no source is set in $settings" "set USER_SOURCE or SCHED_SOURCE"
case $USER_SOURCE$SCHED_SOURCE$SSH_KEY$KNOWN_HOSTS$SCHED_GROUP in
*[[:space:]]*) refuse "a blank in a setting of $settings" "remove it" ;;
esac
command -v rsync >/dev/null || refuse "rsync is not installed" "install the package rsync"
ssh="ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oIdentitiesOnly=yes -oIdentityFile=$SSH_KEY"
export RSYNC_RSH="$ssh -oUserKnownHostsFile=$KNOWN_HOSTS -oConnectTimeout=30"
umask 077
[ -e "$ADVICE_DIR" ] || [ -L "$ADVICE_DIR" ] || mkdir -m 0711 "$ADVICE_DIR"
require_own "$ADVICE_DIR"
failed=''
if [ -n "$USER_SOURCE" ]; then
    copy=$ADVICE_DIR/.copy
    [ -e "$copy" ] || [ -L "$copy" ] || mkdir -m 0700 "$copy"
    require_own "$copy"
    copy_part user "$USER_SOURCE" "$copy/user" 0700 0600 16m
    [ -n "$failed" ] || "$DISTRIBUTE" --from "$copy" --to "$ADVICE_DIR" --no-sched >/dev/null || failed=' user'
fi
copy_part sched "$SCHED_SOURCE" "$ADVICE_DIR/sched" 0750 0640 1m --owner --group --numeric-ids \
    ${SCHED_GROUP:+--chown=0:$SCHED_GROUP}
if [ -n "$failed" ]; then
    printf 'error: not everything was copied:%s; files of the last copy are still in place\n' "$failed" >&2
    printf 'try: read the message above; docs/admin.md lists what the source must allow\n' >&2
    exit 5
fi

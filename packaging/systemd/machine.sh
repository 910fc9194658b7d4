# Sourced: a systemd of its own, as root on a machine that has systemd installed but need not run it. It runs in namespaces that
# vanish at the end, on the files of LOWER, which it does not change.
#
#   start_machine LOWER PREPARE    PREPARE, an exported function, gets the root directory before systemd starts in it
#   there COMMAND...               runs a command in that machine
#
# Below the root directory everything is on an ext4 of its own; "$machine" is a directory of that ext4 for what an overlay cannot hold.

machine=$(mktemp -d)

boot() {
    mount --make-rprivate /
    mount -o loop /proc/self/fd/3 "$machine"
    local root=$machine/root
    mkdir "$machine/up" "$machine/work" "$root"
    mount -t overlay overlay -o "lowerdir=$1,upperdir=$machine/up,workdir=$machine/work" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mkdir -p "$root/etc/systemd/system/larder.service.d"
    # Of what the files of LOWER would start, nothing.
    rm -rf "$root"/etc/systemd/system/*.wants
    (echo -500 >/proc/self/oom_score_adj) 2>/dev/null ||
        printf '[Service]\nOOMScoreAdjust=0\n' >"$root/etc/systemd/system/larder.service.d/machine.conf"
    printf '[Unit]\nDescription=larder\nWants=systemd-journald.service dbus.service\n' >"$root/etc/systemd/system/larder-try.target"
    "$2" "$root"
    exec chroot "$root" env -i container=other PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --system --unit=larder-try.target
}

start_machine() {
    truncate -s 2G "$machine.ext4"
    mkfs.ext4 -q "$machine.ext4"
    export -f boot
    export machine
    unshare -m -p -f -u -i --kill-child bash -c 'boot "$@"' boot "$1" "$2" 3<>"$machine.ext4" >"$machine.log" 2>&1 &
    outer=$!
    until_holds "systemd runs" there systemctl show --property=Version
}

# What a trap on EXIT calls.
stop_machine() {
    if [ -n "${outer:-}" ]; then
        kill -9 "$outer" 2>/dev/null || true
        wait "$outer" 2>/dev/null || true
    fi
    rm -rf "$machine" "$machine.ext4" "$machine.log"
}

there() { nsenter -t "$(pgrep -P "$outer")" -m -p -u -i -r -w -- "$@"; }
property() { there systemctl show -p "$1" --value larder.service; }
is() { [ "$(property "$1")" = "$2" ]; }
is_not() { [ "$(property "$1")" != "$2" ]; }

until_holds() {
    local what=$1 left=600
    shift
    until "$@" >/dev/null 2>&1; do
        ((left--)) || { echo "NOT SEEN: $what" && { there journalctl -u larder --no-pager -n 20 || cat "$machine.log"; } && exit 1; }
        sleep 0.1
    done
    echo "$what"
}

# Sourced by the other scripts: makes sure that the servers which larder plays and tests with are installed.

# The Debian packages that are missing here, one a line: the servers, and those that are named. Nearly every package has
# a program of its own name.
missing_packages() {
    local package program
    for package in containerd runc docker-registry skopeo openssl umoci util-linux "$@"; do
        case $package in
        docker.io) program=dockerd ;;
        util-linux) program=setpriv ;;
        systemd) program=systemd-analyze ;;
        busybox-static) program=busybox ;;
        e2fsprogs) program=mkfs.ext4 ;;
        xfsprogs) program=mkfs.xfs ;;
        btrfs-progs) program=mkfs.btrfs ;;
        erofs-utils) program=fsck.erofs ;;
        libarchive-tools) program=bsdtar ;;
        qemu-user-static) program=qemu-aarch64-static ;;
        chromium-driver) program=chromedriver ;;
        *) program=$package ;;
        esac
        PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$program" >/dev/null || echo "$package"
    done
}

# Installs what is missing of the servers and of the packages that are named, without starting any of it as a service of
# this machine. Fails, and says why, if it cannot.
install_servers() {
    local missing log policy=/usr/sbin/policy-rc.d made_policy=no outcome=0
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    missing=$(echo $missing)
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "missing: $missing (as root on Debian: apt-get install -y $missing)" >&2
        return 1
    fi
    echo "installing: $missing"
    log=$(mktemp)
    # Debian starts servers when it installs them, unless this file says no.
    if [ ! -e "$policy" ]; then
        # Left behind, it would keep this machine's own services from starting: it goes however this ends.
        trap "rm -f $policy" EXIT
        trap "exit 130" INT TERM
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
        made_policy=yes
    fi
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # one word per package
    { apt-get install -y --no-install-recommends $missing || {
        apt-get update && apt-get install -y --no-install-recommends $missing
    }; } >"$log" 2>&1 </dev/null || outcome=1
    if [ "$made_policy" = yes ]; then
        rm -f "$policy"
        trap - EXIT INT TERM
    fi
    if [ "$outcome" = 0 ] && [ -d /run/systemd/system ]; then
        # They were installed for larder's private ones only: nothing is to run after the next boot either.
        for package in $missing; do
            case $package in
            containerd | docker-registry | prometheus) systemctl disable --quiet "$package" || true ;;
            docker.io) systemctl disable --quiet docker.service docker.socket || true ;;
            esac
        done
    fi
    [ "$outcome" = 0 ] || { echo "could not install $missing; apt-get said:" && tail -n 20 "$log"; } >&2
    rm -f "$log"
    return "$outcome"
}

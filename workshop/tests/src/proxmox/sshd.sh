# Runs in a mount namespace of its own on a lab's host, since sshd needs a user and a directory that
# the machine may lack.
#
# Arguments: the directory into which sshd was unpacked, the host's own directory as seen from
# outside, and as seen inside.
set -eu
tree=$1 outside=$2 own=$3
files=$own/ssh
mount -n --make-rprivate /
mkdir -p "$files/upper" "$files/work"
mount -n -t tmpfs layers "$files/work"
mkdir "$files/work/up" "$files/work/work"
mount -n -t overlay -o "lowerdir=/run,upperdir=$files/work/up,workdir=$files/work/work" overlay /run
mkdir -p /run/sshd "$own"
chmod 755 /run/sshd
mount -n --bind "$outside" "$own"
{ cat /etc/passwd; echo 'sshd:x:64056:65534::/run/sshd:/usr/sbin/nologin'; } > "$files/passwd"
grep -q '^sshd:' /etc/passwd || mount -n --bind "$files/passwd" /etc/passwd
cat > "$files/qm" <<'QM'
#!/bin/sh
# As far as `qm mtunnel` goes before it is told anything.
echo 'tunnel online'
echo 'ver 2'
exec cat > /dev/null
QM
chmod 755 "$files/qm"
cat > "$files/config" <<CONFIG
Port 22
HostKey $files/host
AuthorizedKeysFile $files/user.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
AllowStreamLocalForwarding yes
ForceCommand $files/qm
CONFIG
LD_LIBRARY_PATH=$(echo "$tree"/usr/lib/*-linux-gnu "$tree"/lib/*-linux-gnu | tr ' ' ':')
export LD_LIBRARY_PATH
exec "$tree/usr/sbin/sshd" -D -e -f "$files/config"

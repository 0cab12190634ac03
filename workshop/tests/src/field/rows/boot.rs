//! What makes a guest boot.

use crate::field::{Done, Field};

/// A program that opens the watchdog and then hangs.
pub(super) fn watchdog(field: &mut Field) -> Done {
    let find = "w=/dev/$(basename $(dirname $(grep -l i6300 /sys/class/watchdog/*/identity)))";
    boots(field, |field| field.sh_later(&format!("{find}; exec 3>$w; sleep 1000")))
}

/// Does something after which the guest boots.
pub(super) fn boots(field: &mut Field, act: impl FnOnce(&mut Field) -> Done) -> Done {
    let before = field.guest().pulse().boots;
    act(field)?;
    field.guest().wait_boots(before + 1).map_err(|error| error.to_string())?;
    Ok(String::new())
}

pub(super) fn reboot(field: &mut Field) -> Done {
    boots(field, |field| field.sh_later("systemctl reboot"))
}

pub(super) fn kexec(field: &mut Field) -> Done {
    field.sh(
        "k=$(uname -r); kexec --load /boot/vmlinuz-$k --initrd=/boot/initrd.img-$k --reuse-cmdline",
    )?;
    boots(field, |field| field.sh_later("systemctl kexec"))
}

pub(super) fn start_again(field: &mut Field) -> Done {
    boots(field, |field| {
        field.sh_later("systemctl poweroff")?;
        field.start_again();
        Ok(String::new())
    })
}

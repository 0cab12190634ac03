//! `xl migrate` and `xl migrate-receive`, as in Xen 4.17 (`tools/xl/xl_migrate.c`).

use xen::handshake::Answer;

use crate::world::{Carried, World};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Xl {
    /// It waits for the banner. Its domain runs.
    Starting,
    /// Its domain runs.
    Streaming,
    /// Its domain is suspended. It waits for "ready".
    Suspended,
    /// It has written the permission, and waits for the report.
    Permitted,
    /// The receiver has failed. It waits until the domain is handed back.
    Failed,
    /// It has exited, and the domain runs.
    Resumed,
    /// It has exited, and the domain is destroyed.
    Destroyed,
    /// It has exited, and the domain is suspended for good.
    Stuck,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Receiver {
    Starting,
    /// It waits for the stream.
    Receiving,
    /// It waits for the permission.
    Loaded,
    /// It has unpaused the copy, and will report that.
    Unpaused,
    /// It has reported a failure, and will destroy the copy.
    Failing,
    Exited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReceivedCopy {
    None,
    Paused,
    Running,
}

impl World {
    pub(crate) fn xl_reads(&mut self) -> bool {
        let answer = match self.to_xl.pop_front() {
            None if !self.is_xl_closed => return false,
            answer => answer,
        };
        match (self.xl, answer) {
            (Xl::Starting, Some(Answer::Banner)) => self.xl = Xl::Streaming,
            (Xl::Suspended, Some(Answer::Ready)) => {
                self.xl = Xl::Permitted;
                self.permission = true;
            }
            (Xl::Permitted, Some(Answer::Report { status: 0 })) => {
                return self.xl_exits(Xl::Destroyed);
            }
            (Xl::Permitted, Some(Answer::Report { .. })) => self.xl = Xl::Failed,
            (Xl::Failed, Some(Answer::HandedBack)) | (Xl::Starting | Xl::Suspended, None) => {
                return self.xl_exits(Xl::Resumed);
            }
            (Xl::Permitted | Xl::Failed, None) => return self.xl_exits(Xl::Stuck),
            _ => return false,
        }
        true
    }

    pub(crate) fn xl_streams(&mut self) -> bool {
        if self.xl != Xl::Streaming {
            return false;
        }
        if self.is_xl_closed {
            return self.xl_exits(Xl::Resumed);
        }
        self.xl = Xl::Suspended;
        if self.is_connected {
            self.forward.push_back(Carried::Stream);
        }
        true
    }

    pub(crate) fn xl_exits(&mut self, xl: Xl) -> bool {
        self.xl = xl;
        self.xl_exit = true;
        true
    }

    pub(crate) fn receiver_goes_on(&mut self) -> bool {
        match self.receiver {
            Receiver::Starting => {
                self.from_receiver.push_back(Answer::Banner);
                self.receiver = Receiver::Receiving;
            }
            Receiver::Receiving if self.has_stream => {
                self.from_receiver.push_back(Answer::Ready);
                (self.receiver, self.copy) = (Receiver::Loaded, ReceivedCopy::Paused);
            }
            Receiver::Receiving if self.is_receiver_closed => return self.receiver_exits(),
            Receiver::Loaded if self.is_permitted => {
                (self.receiver, self.copy) = (Receiver::Unpaused, ReceivedCopy::Running);
            }
            // It could not read the permission.
            Receiver::Loaded if self.is_receiver_closed => return self.receiver_fails(u8::MAX),
            Receiver::Unpaused => {
                self.from_receiver.push_back(Answer::Report { status: 0 });
                return self.receiver_exits();
            }
            Receiver::Failing => {
                self.from_receiver.push_back(Answer::HandedBack);
                self.copy = ReceivedCopy::None;
                return self.receiver_exits();
            }
            _ => return false,
        }
        true
    }

    pub(crate) fn receiver_fails(&mut self, status: u8) -> bool {
        self.from_receiver.push_back(Answer::Report { status });
        self.receiver = Receiver::Failing;
        true
    }

    pub(crate) fn receiver_exits(&mut self) -> bool {
        self.receiver = Receiver::Exited;
        self.receiver_exit = true;
        true
    }
}
